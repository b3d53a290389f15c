/* Makes a loop device end after so many bytes, mounted or not: what lies behind cannot be read or
 * written (EIO) until the device is given its length back with 0.
 *
 *   shorten /dev/loopN BYTES
 */
#include <fcntl.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>

int main(int argc, char **argv)
{
    struct loop_info64 info;
    if (argc != 3) {
        fprintf(stderr, "usage: shorten /dev/loopN BYTES\n");
        return 2;
    }
    int device = open(argv[1], O_RDWR | O_CLOEXEC);
    if (device < 0 || ioctl(device, LOOP_GET_STATUS64, &info) < 0) {
        perror(argv[1]);
        return 1;
    }
    info.lo_sizelimit = strtoull(argv[2], NULL, 10);
    if (ioctl(device, LOOP_SET_STATUS64, &info) < 0) {
        perror(argv[1]);
        return 1;
    }
    return 0;
}
