"""A control plane as a process of its own, whose runs are curve_worker's. `curve_server.py DATA_DIR PORT [KUBECONFIG]`.

Its pages look five times as often as they do for people, so that tests wait a fifth of the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from twinstep.platform.dashboard import job_page, jobs_page
from twinstep.platform.server import serve
from twinstep.platform.settings import ClusterSettings, Settings

job_page.REFRESH_SECONDS = jobs_page.REFRESH_SECONDS = 0.2
serve(
    Settings(
        data_dir=Path(sys.argv[1]),
        port=int(sys.argv[2]),
        max_parallel_runs=4,
        reconcile_seconds=0.05,
        cluster=ClusterSettings(kubeconfig=Path(sys.argv[3])) if len(sys.argv) > 3 else None,
        worker_command=(sys.executable, str(Path(__file__).parent / "curve_worker.py")),
    ),
    on_ready=lambda url: print(url, flush=True),
)
