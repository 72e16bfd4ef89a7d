"""How far a method can be trusted: measured on planted answers, on the prompt at hand, and on a broken model.

* ``distractors``, ``needle``: prompts with a made-up secret, their exact token sets, and whether the model answers.
* ``needle_metrics``: how much of a map lies on what the answer needs. Plain arithmetic, no model.
* ``faithfulness``: what happens to the target when the highest units are hidden, or alone are left.
* ``sanity``: the model is the same afterwards; scores repeat; the map changes when the model is broken.
* ``bench``, ``bench_plan``, ``bench_table``: the same needles for all registered methods, row by row.
* ``badge``: the measured number that stands beside a map.

``needle_metrics``, ``bench_plan``, ``bench_table`` and ``badge`` need no torch, and pages may import them.
"""
