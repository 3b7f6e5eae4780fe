"""What the file of an estimator or a loss declares, and how it is read.

``algorithm.py`` is the algorithms and needs that it names, ``settings.py`` the settings in its function's signature,
``discovery.py`` finds the files. Left out: the tables that follow (``penstock.algorithms.registry``).
"""
