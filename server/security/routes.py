"""Who may call which route: below /admin the operator, elsewhere clients with an API key, but for
these exceptions.
"""

from __future__ import annotations

from typing import Literal

Access = Literal["open", "probe", "client", "admin", "admin key"]
"""Who may call.

open       anyone
probe      anyone, unless --metrics-need-key
client     an API key, where there are any
admin      an admin key; this machine, if the gateway has no keys and listens to this machine only
admin key  an admin key, always
"""

EXCEPTIONS: dict[str, Access] = {
    "/health": "open",  # a load balancer has no key
    "/ready": "open",
    "/version": "open",
    "/metrics": "probe",
    "/load": "probe",
    "/": "open",  # the page and its files hold no numbers
    "/live/static/{version}/{name:path}": "open",
    "/live/events": "probe",
    "/live/history": "probe",
    "/admin/servers": "admin key",  # it starts and ends engines
    "/admin/calibrate": "admin key",  # it takes the engine
    "/admin/drain": "admin key",  # it ends the service
}
PASSED = frozenset({"/v1/rerank", "/v1/score"})  # with --engine http, besides the others
PAGE_FILES = "/live/static/"  # open, whatever follows
ADMIN = "/admin"  # whatever begins so is the operator's, known or not
# whose clients send their keys under a header of their own
ANTHROPIC = frozenset({"/v1/messages", "/v1/messages/count_tokens", "/openai/v1/messages"})
WORK = frozenset(  # bodies that make the engine or the tokenizer work
    f"{base}/v1/{name}"
    for base in ("", "/openai")
    for name in ("completions", "chat/completions", "responses", "messages")
) | {
    *("/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize"),
    *PASSED,
}


def access_of(path: str) -> Access:
    """Who may call this route."""
    return EXCEPTIONS.get(path, "admin" if path.startswith(ADMIN) else "client")


def paths(access: Access) -> frozenset[str]:
    """The exceptions of this kind."""
    return frozenset(path for path, decided in EXCEPTIONS.items() if decided == access)
