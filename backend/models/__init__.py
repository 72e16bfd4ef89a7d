"""Loading, placing, leasing and evicting models. Knows nothing of methods.

``placement`` device and dtype · ``sources`` id to folder of files · ``bundled`` the embedded model · ``loading``
folder to model · ``language`` the loaded model · ``passage`` text to tokens with roles · ``generation`` answers ·
``hub`` leases, eviction, the load lock.
"""
