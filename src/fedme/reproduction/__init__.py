"""The papers' tables and figures: their numbers, the experiments behind them, and our results.

`catalogue` reads the data files, `planned_runs` makes experiments from them, `measured` extracts measurements from run
directories, `findings` collects them, `claim_verdicts` compares them with the papers, and `comparison_tables`, `figures` and
`results_page` write the results. `power_plan` says which runs decide most.
"""
