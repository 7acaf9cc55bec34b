"""The step loop: plan, check, dispatch, launch, commit."""
