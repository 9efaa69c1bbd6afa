"""What is trained: low-rank adapters attached to a frozen base, or chosen base weights themselves."""
