"""Any layer of any PyTorch model, over HTTP.

``layertap.models`` and ``layertap.service`` are the folders of these names at the top of the project, linked here: what
is imported has a name of its own, so that a user's packages called ``models`` or ``service`` never meet them.
"""
