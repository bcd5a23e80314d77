"""One loader process: `python -m twinstep.worker.data.packer SOCKET DATA`, both numbers of inherited files.

It reads numbers of training batches from its socket and answers each with the batch, in their order, until the socket
ends. `packers.py` starts it and reads the answers.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from twinstep.spec.errors import TwinstepError
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.packers import read_shared

PARENT_LOOK_S = 2.0  # a socket may stay open in a process that the run forked: its end alone does not say all


def serve(socket: Connection, loader: Loader) -> None:
    """Answer until the other end is gone."""
    parent = os.getppid()
    while True:
        while not socket.poll(PARENT_LOOK_S):
            if os.getppid() != parent:
                return
        number = socket.recv()
        socket.send_bytes(pickle.dumps(_answer(loader, number), protocol=5))


def _answer(loader: Loader, number: int) -> dict[str, Any]:
    try:
        batch, stats = loader.train_batch(number)
    except TwinstepError as error:
        return {"code": error.code, "problem": error.problem, "remedy": error.remedy}
    except Exception:  # the run says it; here nobody would look
        return {"traceback": traceback.format_exc()}
    return {"batch": type(batch).__name__, "arrays": [each.numpy() for each in batch], "stats": stats}


def main(socket: int, data: int) -> None:
    """Serve batches of the loader that the file `data` holds."""
    torch.set_num_threads(1)
    with Connection(socket) as connection:
        loader = read_shared(data)
        os.close(data)
        serve(connection, loader)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        sys.exit(0)  # whoever asked is gone
