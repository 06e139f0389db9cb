"""Running tasks over subjects: samples that survive a stop, results, tables, plots, the page that compares runs."""
