// The numbers of the .zip format that reading and writing share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headway::io::zip {

inline constexpr std::uint32_t local_signature = 0x04034b50;
inline constexpr std::uint32_t central_signature = 0x02014b50;
inline constexpr std::uint32_t end_signature = 0x06054b50;
inline constexpr std::uint32_t end64_signature = 0x06064b50;
inline constexpr std::uint32_t locator64_signature = 0x07064b50;

// Sizes without the name, extra fields and comments that follow each record.
inline constexpr std::size_t local_bytes = 30;
inline constexpr std::size_t central_bytes = 46;
inline constexpr std::size_t end_bytes = 22;
inline constexpr std::size_t end64_bytes = 56;
inline constexpr std::size_t locator64_bytes = 20;

// In a 16-bit or 32-bit field: the real number is in the zip64 record.
inline constexpr std::uint16_t in_zip64_16 = 0xffff;
inline constexpr std::uint32_t in_zip64_32 = 0xffffffff;
inline constexpr std::uint16_t zip64_extra = 1;

inline constexpr std::uint16_t stored = 0;
inline constexpr std::uint16_t deflated = 8;

inline constexpr std::uint16_t flag_encrypted = 0x2041;  // three bits, one for each kind of encryption
inline constexpr std::uint16_t flag_sizes_follow = 0x0008;
inline constexpr std::uint16_t flag_utf8 = 0x0800;

// zlib's window bits for raw deflate data, which is what an archive holds, without zlib or gzip headers.
inline constexpr int bare_window_bits = -15;

}  // namespace headway::io::zip
