"""Loading, placing, leasing and evicting models. Knows nothing of methods.

Files: ``identity`` fingerprint for cache keys · ``sources`` id to files · ``download`` from a hub · ``bundled`` the
embedded model · ``weights`` file headers · ``architecture`` what may be loaded. Loading: ``placement`` device and
dtype · ``loading`` files to model · ``language`` the loaded model · ``hub`` leases, eviction, the load lock · ``quiet``
no library chatter. Text: ``passage`` prompts and answers as tokens with roles · ``chat`` templates · ``characters``
tokens to characters · ``cutting`` prompts that are too long · ``generation`` answers and their probabilities.
"""
