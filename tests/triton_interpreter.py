"""Without a GPU, Triton kernels run in its interpreter; the choice is made when triton loads.

The conftest imports this before any test is collected, since many of them load triton.
"""

import os
import sys
from typing import Any

import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "triton was loaded before the choice"
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """A scalar is an array of one element there, which numpy no longer takes for a number."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
