"""The live page: what an operator looks at. Served by the gateway itself, with nothing to install
and nothing asked of a network.

Once a second the gateway's state is put together (`state`), kept (`history`) and sent to every
viewer as the same bytes (`feed`).
"""

from __future__ import annotations

from kendall.server.page.feed import Feed
from kendall.server.page.routes import add_page

__all__ = ["Feed", "add_page"]
