"""Optimizers and schedules by name, and which weight each applies to."""
