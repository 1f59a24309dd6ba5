"""The scheduler's policies, one small file each; `engine.scheduler` composes them."""
