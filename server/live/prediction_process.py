"""The predicting process itself: `python -m server.live.prediction_process DESCRIPTOR`, until the
gateway is gone.

A thread reads the questions, so that the end of the gateway ends it in the middle of one.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
import traceback
from typing import Any

from kendall.server.live.prediction_client import SIZE_BYTES, framed
from kendall.server.runtime.pools import serve_the_gateway

Question = tuple[int, str, tuple[Any, ...]]


def main(descriptor: int) -> None:
    """Answer one question after the other."""
    serve_the_gateway()  # ended with it also where one computation keeps the thread from reading
    connection = socket.socket(fileno=descriptor)
    questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, questions), daemon=True).start()
    while True:
        connection.sendall(_answer(*questions.get()))


def _receive(connection: socket.socket, questions: queue.SimpleQueue[Question]) -> None:
    with connection.makefile("rb") as incoming:
        while len(size := incoming.read(SIZE_BYTES)) == SIZE_BYTES:
            questions.put(pickle.loads(incoming.read(int.from_bytes(size, "big"))))
    os._exit(0)


def _answer(number: int, function: str, arguments: tuple[Any, ...]) -> bytes:
    from kendall.server.live import prediction_worker  # noqa: PLC0415 - only here is the mathematics loaded, and with the first question

    try:
        return framed((number, True, getattr(prediction_worker, function)(*arguments)))
    except Exception as error:  # noqa: BLE001 - raised again in the gateway
        return framed_failure(number, error)


def framed_failure(number: int, error: Exception) -> bytes:
    """The error with its traceback as a note; where it cannot be sent as it is, one that says
    the same.
    """
    said = "".join(traceback.format_exception(error))
    error.add_note(said)
    try:
        data = framed((number, False, error))
        pickle.loads(data[SIZE_BYTES:])
    except Exception:  # noqa: BLE001
        return framed((number, False, RuntimeError(said)))
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
