"""Rounds of a federation: who is asked, which replies count, what fails, and the transports that carry messages."""
