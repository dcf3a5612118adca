"""Any number of training runs: a self-contained HTML page, one table, and every loop on one text.

page         write_report, the library call; the HTML    tables  the tables of the page
figures      what is drawn                               panel   how one figure is drawn
comparison   compare, the library call: one table        runs    what a run has written
seeds        runs that differ in the seed only
loop_figure  the figure of the demo: loss and state of a model at 1 to 16 loops
trace_figure what each loop does to each token of a text
"""
