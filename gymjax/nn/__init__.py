"""Building blocks of the decoder: linear, norm, rotary positions, attention, feed-forward."""
