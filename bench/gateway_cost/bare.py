"""What the framework alone can do: a FastAPI handler that answers with bytes it has: no queue,
policy, metrics, or look at the body.

`python -m bench.gateway_cost.bare PORT` serves the gateway's paths: a whole answer, and one
streamed event by event, each as large as the gateway's own. Same server (uvicorn, uvloop,
httptools) and the same settings of it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

TOKENS = 128  # events of a stream, before the one that says that it is over
EVENT = (
    b'data: {"id":"cmpl-1a2b","object":"text_completion","created":1700000000,"model":"tiny",'
    b'"choices":[{"index":0,"text":" word17",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
WHOLE = (
    b'{"id":"cmpl-1a2b","created":1700000000,"model":"tiny","object":"text_completion",'
    b'"choices":[{"index":0,"text":" word17",'
    b'"logprobs":null,"finish_reason":"length","stop_reason":null}],'
    b'"usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17,'
    b'"kendall":{"queueing_delay_ms":0.021,"service_ms":0.143,"batch_size":1}}}'
)

app = FastAPI(docs_url=None, redoc_url=None)


@app.post("/whole")
async def whole(request: Request) -> Response:
    """The body is read, as every server must."""
    await request.body()
    return Response(WHOLE, media_type="application/json")


@app.post("/stream")
async def stream(request: Request) -> Response:
    await request.body()

    async def events() -> AsyncIterator[bytes]:
        for _ in range(TOKENS):
            yield EVENT
        yield DONE

    return StreamingResponse(events(), media_type="text/event-stream")


calls = 0  # that wait


@app.post("/wait")
async def wait(request: Request) -> Response:
    """Until the client has left."""
    global calls  # noqa: PLW0603 - the one count of this program
    await request.body()
    calls += 1
    try:
        while not await request.is_disconnected():
            await request.receive()
    finally:
        calls -= 1
    return Response()


@app.get("/waiting")
async def waiting() -> int:
    return calls


@app.get("/ready")
async def ready() -> Response:
    return Response()


if __name__ == "__main__":
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        loop="uvloop",
    )
