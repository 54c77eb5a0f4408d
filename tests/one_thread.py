"""Loaded by pytest before any other plugin, as one of them loads NumPy: on small matrices more
threads of OpenBLAS only spin.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
