"""What each command of ``flodl-tw`` does with its options; the command line itself is ``main.py``.

Twisted is imported once a command needs it, so that the GPU tools run meanwhile.
"""
