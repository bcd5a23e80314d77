"""Models as plain `nn.Module`s: static shapes, no control flow on data, no backend named.

Door: `registry.build_model`. The compiler and these modules never import each other.
"""
