"""Quality measurements on a causal language model: one function a file, a dataclass as result."""
