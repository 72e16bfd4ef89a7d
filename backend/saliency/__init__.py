"""Token saliency for causal language models: one module per method, registered on import.

A method is a function ``run(model, question, params, tick) -> Scores``:

* ``model`` (``backend.models.language.LanguageModel``) is ready and nobody else uses it meanwhile; it is the same
  afterwards, also after an error: no hook, flag, kernel or cache is left behind.
* ``question`` (``backend.saliency.question.Question``) holds ids, rows, units and the scalar to explain.
* ``params`` is the module's frozen ``Params``; ``tick(done, total)`` reports progress and raises ``Cancelled``.

Pages read names and ``Params`` from these modules, so they import torch and the torch-bound helpers inside
functions only. Shared parts: ``question`` (targets, foils, scalars), ``gradients`` (embedding leaf, backward),
``ablation`` (hide, delete, replace; prefix cache), ``units`` (words, sentences), ``reading`` (shares, agreement),
``explain`` (runs a whole request).
"""

from backend.saliency import (
    gradient_norm,
    input_x_gradient,
    integrated_gradients,
    occlusion,
    uniform,
)

__all__ = ["gradient_norm", "input_x_gradient", "integrated_gradients", "occlusion", "uniform"]
