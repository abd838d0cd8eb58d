"""Environments of other libraries with TensorDict methods, one module each, as TorchRL has them."""
