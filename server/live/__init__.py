"""The live model: what the gateway sees of itself, what theory says to it, and what would be
better.
"""

from kendall.server.live.model import LiveModel

__all__ = ["LiveModel"]
