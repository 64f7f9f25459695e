"""The launcher's loop without a server."""

import signal

from dspark.serving.launcher import _StopSignals, _supervise
from dspark.serving.supervisor import Supervisor


class Interrupted:
    """A child whose look, or whose restart, a signal falls into."""

    def __init__(self, stop, *, dead):
        self.stop, self.dead, self.revived = stop, dead, False

    def fault(self):
        if not self.dead:
            self.stop.handle(signal.SIGTERM, None)
        return "it died" if self.dead else None

    def revive(self):
        self.stop.handle(signal.SIGTERM, None)
        self.revived = True


def test_a_signal_amid_a_look_or_a_restart_ends_the_loop_so_that_what_runs_is_drained():
    for dead in (False, True):
        stop = _StopSignals()
        child = Interrupted(stop, dead=dead)
        _supervise(Supervisor([child], max_restarts=3, say=lambda _text: None), stop)
        assert stop.count == 1 and not child.revived
