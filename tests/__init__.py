"""The tests.

What they start gets signals as any program does, though `&` or nohup ignores
some in this process; and how fast examples are made, on whatever machine this
is, fails no test.
"""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        # Ignored signals are inherited by every child.
        signal.signal(number, handler)
