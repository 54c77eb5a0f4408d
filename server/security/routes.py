"""Who may call which route. A route that stands here is decided; any other needs a key, and a
test fails until it stands here.
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

DECISIONS: dict[str, Access] = {
    "/health": "open",  # a load balancer has no key
    "/ready": "open",
    "/version": "open",
    "/metrics": "probe",
    "/load": "probe",
    "/openapi.json": "client",
    "/v1/models": "client",
    "/v1/completions": "client",
    "/v1/chat/completions": "client",
    "/v1/models/{name:path}": "client",
    "/v1/responses": "client",
    "/v1/messages": "client",
    "/v1/messages/count_tokens": "client",
    "/v1/embeddings": "client",
    "/tokenize": "client",
    "/detokenize": "client",
    "/openai/v1/models": "client",  # where KServe has them
    "/openai/v1/models/{name:path}": "client",
    "/openai/v1/completions": "client",
    "/openai/v1/chat/completions": "client",
    "/openai/v1/responses": "client",
    "/openai/v1/messages": "client",
    "/": "open",  # the page and its files hold no numbers
    "/live/static/{version}/{name:path}": "open",
    "/live/events": "probe",
    "/live/history": "probe",
    "/admin/policy": "admin",
    "/admin/autopilot": "admin",
    "/admin/state": "admin",
    "/admin/prediction": "admin",
    "/admin/advice": "admin",
    "/admin/servers": "admin key",  # it starts and ends engines
    "/admin/calibrate": "admin key",  # it takes the engine
    "/admin/drain": "admin key",  # it ends the service
}
PASSED: dict[str, Access] = {  # with --engine http, besides those above
    "/v1/rerank": "client",
    "/v1/score": "client",
}
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


def paths(access: Access) -> frozenset[str]:
    """The routes of this kind."""
    return frozenset(path for path, decided in (DECISIONS | PASSED).items() if decided == access)
