"""What the Focused Transformer is compared with: training with windows that are carried from step to step, without gradient.

memorizing        memory layers see the k best keys of earlier windows of the document, encoded as if first
transformer_xl    all layers see the window before, at its true distance

Both are an `AdditionalContext` over `Carried`; `reference.py` is their definition.
"""
