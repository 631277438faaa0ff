"""`python -m frontend --config FILE`: the frontend as a child process of the supervisor."""

from common.child import run_child


def _main() -> None:
    def main(*arguments: object) -> int:
        from frontend.main import main as run

        return run(*arguments)  # type: ignore[arg-type]

    run_child("frontend", main)


if __name__ == "__main__":
    _main()
