"""The served model of the tests: the real one, plus a back door by request parameter.

Triton loads this file as model.py. `test_command` = "stats" answers with the engine's counters, "die" kills the engine
thread at its next step, "slow" makes every step take 20 ms, "hold" makes the next step wait for another command,
"no drafts" makes every call of the drafter fail, "fast" undoes all that.
"""

import json
import threading
import time
from dataclasses import asdict

from dspark.request import RequestOutput
from dspark.serving.triton_model import TritonPythonModel as Served


class TritonPythonModel(Served):
    def initialize(self, args):
        self._go = threading.Event()
        self._peak_running = 0  # most at once in a slow step since the last "fast"
        super().initialize(args)

    def _submit(self, request, stream):
        command = json.loads(request.parameters() or "{}").get("test_command")
        engine = self._runtime.engine
        if command is None:
            super()._submit(request, stream)
            return
        if command == "hold":
            self._go.clear()
        elif command != "stats":
            self._go.set()
        if command == "die":
            engine._engine.step = self._die
        elif command in ("slow", "hold"):
            engine._engine.step = self._slow_step
        elif command == "no drafts":
            engine._engine.drafter.propose = self._die
        elif command == "fast":
            engine._engine.__dict__.pop("step", None)
            engine._engine.drafter.__dict__.pop("propose", None)
            self._peak_running = 0
        counters = {
            **asdict(engine.stats()),
            "open": engine.num_open,
            "peak_running": self._peak_running,
            "metrics_s": self._metrics.busy_s,
            "num_flushes": self._metrics.num_flushes,
        }
        stream.emit(RequestOutput(request_id=-1, text=json.dumps(counters), finish_reason="stop"))

    def _slow_step(self):
        engine = self._runtime.engine._engine
        self._go.wait(60.0)
        time.sleep(0.02)
        type(engine).step(engine)
        self._peak_running = max(self._peak_running, engine.stats().num_running)

    def _die(self, *_given):
        raise MemoryError("the test asked for it")
