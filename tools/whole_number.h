#pragma once

#include <charconv>
#include <limits>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>

namespace sparse_mla::command {

/// Refuses a text that is no decimal integer of type T. CLI11 reads with strtoll and its kin, which
/// turn −1 into 2^64 − 1 and what is too large into the largest number, without a word. A range
/// inside the type's own needs no such check.
template <class T>
CLI::Validator whole_number() {
  return CLI::Validator(
      [](std::string& text) {
        T value = 0;
        const char* last = text.data() + text.size();
        const auto [end, error] = std::from_chars(text.data(), last, value);
        if (error == std::errc() && end == last) return std::string();
        return "got " + text + ", expected an integer of at most " +
               std::to_string(std::numeric_limits<T>::max());
      },
      "", "whole number");
}

}  // namespace sparse_mla::command
