"""Its being here puts this folder among those that tests import from: awkward.py is for several of its folders."""
