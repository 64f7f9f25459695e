"""The served model of the tests: the real one, plus a back door by request parameter.

Triton loads this file as model.py. `test_command` = "stats" answers with the engine's counters, "die" kills the engine
thread at its next step, "slow" makes every step take 20 ms, "fast" undoes that.
"""

import json
import time
from dataclasses import asdict

from dspark.request import RequestOutput
from dspark.serving.triton_model import TritonPythonModel as Served


class TritonPythonModel(Served):
    def _submit(self, request, stream):
        command = json.loads(request.parameters() or "{}").get("test_command")
        engine = self._runtime.engine
        if command is None:
            super()._submit(request, stream)
            return
        if command == "die":
            engine._engine.step = self._die
        elif command == "slow":
            step = type(engine._engine).step
            engine._engine.step = lambda: (time.sleep(0.02), step(engine._engine))[1]
        elif command == "fast":
            engine._engine.__dict__.pop("step", None)
        counters = {**asdict(engine.stats()), "open": engine.num_open, "metrics_s": self._metrics.busy_s}
        stream.emit(RequestOutput(request_id=-1, text=json.dumps(counters), finish_reason="stop"))

    def _die(self):
        raise MemoryError("the test asked for it")
