"""Where a checkpoint is, what it says, and its tensors into parameters."""
