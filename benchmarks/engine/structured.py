"""Structured output: time of masks at a large vocabulary, and throughput of structured rows beside plain ones.

Three measurements, each beside a peer or a limit in the same run:

- *masks*: llguidance's masks and the time to advance, token by token through documents that follow their schemas, with a vocabulary of
  151,643 tokens made here; the same documents and vocabulary with xgrammar, if a Python with it is given.
- *rows*: tokens a second of 64 structured rows and of 64 plain rows of the same lengths, in turn.
- *beside*: tokens a second of 32 plain rows, beside 32 other plain rows and beside 32 structured rows, in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from benchmarks.engine.machine import describe
from benchmarks.engine.subject import make_model
from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.settings import EngineSettings
from engine.structured.compiler import Compiler
from engine.structured.vocabulary import load_vocabulary
