"""The papers' tables and figures: their numbers, the experiments behind them, and what our runs say.

`catalogue` reads the data files; `runs` makes experiments of them; `measured` takes numbers out of run directories; `verdicts`
compares; `report`, `curves` and `page` write down.
"""
