"""A self-contained HTML page about one training run, or several compared.

page      write_report, the library call; the HTML    html      tables, values as text
figures   what is drawn                               panel     how one figure is drawn
runs      what a run has written
"""
