"""`kendall sweep`: policies x loads x token limits against one gateway, resumable."""
