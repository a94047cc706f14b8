"""The protocols behind the port: the door that peeks at four bytes, and what each channel does with the rest."""
