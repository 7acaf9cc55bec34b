"""Steps over several processes: ranks are started, sent steps, watched and ended. core.assembly says what they run."""
