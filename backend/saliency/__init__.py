"""Token saliency for causal language models: one module per method, registered on import.

A method is a function ``run(model, question, params, tick) -> Scores``:

* ``model`` (``backend.models.language.LanguageModel``) is ready and nobody else uses it meanwhile; it is the same
  afterwards, also after an error: no hook, flag, kernel or cache is left behind.
* ``question`` (``backend.saliency.question.Question``) holds ids, rows, units and the scalar to explain.
* ``params`` is the module's frozen ``Params``; ``tick(done, total)`` reports progress and raises ``Cancelled``.

Pages read names and ``Params`` from these modules, so they import torch and the torch-bound helpers inside
functions only. Shared parts:

* ``question``: targets, foils, the scalar S. ``passes``: one pass, logits at chosen positions.
* ``embeddings``: reading and exchanging input embeddings, baselines. ``gradients``: rows and their gradients, batches.
* ``ablation``: hide, delete, replace, for any sets of tokens. It stands on ``variants`` (what is left, where targets
  are read), ``masks`` (attention masks), ``prefix`` (keys and values computed once), ``grouping`` (which share a pass).
* ``lrp_rules``: gradients that follow the rules of AttnLRP. ``choices``: target against foil along the text.
* ``attention_bias``: S and its gradient under numbers added to attention; ``bias_descent`` learns them,
  ``checkpointing`` saves memory. ``own_attention``, ``suppression``: attention to single tokens turned down.
* ``bank``: random ablations, run once and read by many methods; ``runs`` keeps them. ``readouts``: fits and means.
* ``attention_rows``: attention weights under any kernel. ``value_flow``, ``second_order``, ``heta_parts``: the parts of
  HETA. ``at2_weights``, ``at2_training``, ``at2_fitting``, ``at2_texts``: what AT2 learned about a model, and how.
* ``checks``, ``ablation_checks``: assertions and warnings that travel with the scores.
* ``explain``: a whole request, stored scores, refusals. ``calibration``: what it will cost.
* ``units``, ``reading``, ``agreement``: scores at the level of words and sentences, shares, comparison of methods.
"""

from backend.saliency import (
    abo,
    at2,
    atman,
    attention_rollout,
    attn_lrp,
    context_cite,
    ensemble_shap,
    gradient_norm,
    heta,
    input_x_gradient,
    integrated_gradients,
    occlusion,
    smooth_grad,
    tdd,
    token_shap,
    uniform,
)

__all__ = [
    "abo",
    "at2",
    "atman",
    "attention_rollout",
    "attn_lrp",
    "context_cite",
    "ensemble_shap",
    "gradient_norm",
    "heta",
    "input_x_gradient",
    "integrated_gradients",
    "occlusion",
    "smooth_grad",
    "tdd",
    "token_shap",
    "uniform",
]
