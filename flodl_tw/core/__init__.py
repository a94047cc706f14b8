"""What the controller decides, with no network in sight.

Everything below this package imports the standard library and this package
alone, so every rule of the wire, the membership and the window can be tested
by calling a function.
"""
