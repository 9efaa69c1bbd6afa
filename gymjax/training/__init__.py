"""The training step, the loop around it, and what they report."""
