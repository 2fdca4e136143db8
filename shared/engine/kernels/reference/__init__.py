"""What each kernel means, in plain PyTorch that a reader can check by eye."""
