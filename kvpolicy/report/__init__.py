"""Self-contained HTML pages: a tree of elements, charts as inline SVG, tables, common styles.

Nothing here knows a model or a policy; reports of several packages are made of it.
"""
