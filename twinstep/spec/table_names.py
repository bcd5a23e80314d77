"""Names of tables and of the modules that hold them: the same, but where PyTorch keeps a name for itself. Pure.

A table is called as its column is, and a column may well be called `type` or `items`. The collection of tables is an
`nn.ModuleDict`, which has attributes of these names, so the module of such a table has a mark behind its name. Tensors
are then called `embeddings.type~.weight`; wherever people name a table, it is `type`.
"""

from __future__ import annotations

import re

MARK = "~"  # stands in no table's name, so that a marked name is no other table's
_SPECIAL = re.compile(r"__.*__$")  # `__class__` and its kin
_TAKEN = """
    T_destination _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl
    _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
    _forward_pre_hooks_with_kwargs _get_backward_hooks _get_backward_pre_hooks _get_name _is_full_backward_hook
    _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks
    _maybe_warn_non_full_backward_hook _modules _named_members _non_persistent_buffers_set _parameters
    _register_load_state_dict_pre_hook _register_state_dict_hook _replicate_for_data_parallel
    _save_to_state_dict _slow_forward _state_dict_hooks _state_dict_pre_hooks _version _wrapped_call_impl
    add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double dump_patches eval
    extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu items keys
    load_state_dict modules mtia named_buffers named_children named_modules named_parameters parameters pop
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to
    to_empty train training type update values xpu zero_grad
"""
TAKEN = frozenset(_TAKEN.split())
"""Attributes of an `nn.ModuleDict`, held by test to be all there are."""


def module_name(table: str) -> str:
    """Return the name of the module of a table."""
    return f"{table}{MARK}" if table in TAKEN or _SPECIAL.match(table) else table


def table_name(module: str) -> str:
    """Return the name of the table of a module, which may be the last but one part of a tensor's path."""
    return module.removesuffix(MARK)
