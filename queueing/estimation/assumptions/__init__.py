"""What the prediction assumes, and whether the window agrees."""
