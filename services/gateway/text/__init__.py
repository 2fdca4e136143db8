"""Text and token ids: everything that knows the checkpoint's tokenizer, template and markup."""
