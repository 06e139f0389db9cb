"""Training against distraction: rows of a batch attend to windows of their own and of other documents.

`plan` says which row sees which windows, `schedules` how that changes over a run, `reference` defines the
attention, `attend` is its fast form without copies, `context` is what a model's forward takes.
The method: Focused Transformer, arXiv 2307.03170, section 3.2 and appendix A.2.
"""
