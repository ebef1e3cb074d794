"""Declares every external repository of the project.

All of them are found on this machine by repository rules; none is downloaded.
"""

load("//third_party/absl:absl_repository.bzl", "absl_repository")
load("//third_party/cuda:cuda_repository.bzl", "cuda_repository")
load("//third_party/gloo:gloo_repository.bzl", "gloo_repository")
load("//third_party/googletest:googletest_repository.bzl", "googletest_repository")
load("//third_party/libtorch:libtorch_repository.bzl", "libtorch_repository")
load("//third_party/nlohmann_json:nlohmann_json_repository.bzl", "nlohmann_json_repository")

def composable_repositories():
    """Makes @libtorch, @cuda, @com_google_absl, @com_google_googletest, @nlohmann_json, @gloo."""
    libtorch_repository(name = "libtorch")
    cuda_repository(name = "cuda")
    absl_repository(name = "com_google_absl")
    googletest_repository(name = "com_google_googletest")
    nlohmann_json_repository(name = "nlohmann_json")
    gloo_repository(name = "gloo")
