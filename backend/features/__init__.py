"""Image features at full resolution: encoders, upsamplers, and views of what they give.

An upsampler is a function ``run(scene, params, tick) -> Operator``, registered on import with kind "upsampler":

* ``scene`` (``scene.Scene``) holds the picture, its feature map and the wanted size; it is not changed.
* ``params`` is the module's frozen ``Params``; ``tick(done, total)`` reports progress and raises ``Cancelled``.
* The ``Operator`` (``operator``) holds fixed weights from grid to pixels. ``apply`` sends any map on the grid through
  them: the features themselves, or three principal components of them.

Pages read names and ``Params`` from these modules, so they import torch inside functions only. Parts: ``jafar`` and
``anyup`` (the two models) on ``learned_model``, ``blocks``, ``pointwise``, ``attention``, ``learned_operator``;
``interpolation`` and ``filters`` (operators of the baselines); ``weights`` (parameter files); ``encoders``; ``views``,
``pca``, ``similarity``, ``clusters``, ``probe`` (what is shown of features); ``evaluation`` and ``scenes`` (measured
quality).
"""

# isort: off
# The order of menus.
from backend.features import nearest, bilinear, bicubic, joint_bilateral, guided, learned  # noqa: F401 - registers
